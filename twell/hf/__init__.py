"""Hugging Face models: their folders, tokenizers and modules."""
