"""An OpenAI-compatible server and web chat on the inference engine."""
