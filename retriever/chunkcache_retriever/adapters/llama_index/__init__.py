"""LlamaIndex: a model, retriever, node parser and synthesizer. ``pip install 'chunkcache[llama-index]'``."""
