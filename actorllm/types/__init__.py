"""What applications pass in and get back: options, parameters, prompts, objectives and outputs. Plain types."""
