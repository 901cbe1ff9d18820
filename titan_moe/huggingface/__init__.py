"""Weights in and out of the Hugging Face format: safetensors, their index and config.json."""
