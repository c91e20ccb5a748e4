"""The training loop, and what it reads, writes and prints."""
