"""Causal language modelling from the command line: arguments, text, blocks, model, perplexity, results."""
