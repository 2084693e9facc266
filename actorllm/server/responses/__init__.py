"""`/v1/responses`: OpenAI's other API for text, with calls of functions, kept responses, and answers in the background.

Reading order: what may come (`request`), what goes back (`items`, `shape`), what is kept of it (`kept`), and the paths
(`endpoints`).
"""
