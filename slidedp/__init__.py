"""Full-parameter fine-tuning of language models that do not fit in GPU memory."""
