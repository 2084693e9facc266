"""The application's side of a request: the engine, its streams and submission."""
