"""The HTTP server: OpenAI's API over the engine, for many users at once. Needs the extra ``outpace[serve]``."""
