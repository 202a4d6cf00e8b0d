"""OpenAI's HTTP interface: request bodies, responses, what changes logits, and limits."""
