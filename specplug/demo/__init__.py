"""The demo: a small real model, five kinds of prompts, plain and speculative decoding side by side."""
