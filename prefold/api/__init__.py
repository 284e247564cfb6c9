"""Wire formats: the bodies of OpenAI-style requests and responses, as items and results. Never imports torch."""
