"""`/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`: Ollama's API. A body becomes that of a chat or a completion (`bodies`);
the answer is written in lines of JSON (`lines`).
"""
