"""`/v1/messages`: Anthropic's API for text and tools. A body becomes that of a chat (`blocks`); the answer is `message`'s."""
