"""A Hugging Face causal language model as a row of units."""
