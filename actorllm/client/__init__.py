"""The application's side of a request: the engine, its streams, tokenization and submission."""
