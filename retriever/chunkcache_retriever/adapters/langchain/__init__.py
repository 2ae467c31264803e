"""LangChain: a chat model, a retriever, and an index to write to. ``pip install 'chunkcache[langchain]'``."""
