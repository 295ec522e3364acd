"""The routes of dwani.ai's API, whose request forms differ from OpenAI's."""
