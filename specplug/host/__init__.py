"""The host decoding loop over Hugging Face causal LMs."""
