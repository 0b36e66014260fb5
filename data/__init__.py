"""Text to tokens to shards (`python -m data.prepare`), and shards to batches (`data.loader`)."""
