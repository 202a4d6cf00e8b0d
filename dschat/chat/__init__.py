"""Interactive chat with a trained model."""
