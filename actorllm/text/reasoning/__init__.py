"""What a model thinks before it answers: read in its text (`parsers`, `harmony`), and bounded and told from the answer by tokens
(`thought`)."""
