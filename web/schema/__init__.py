"""Requests and responses of the OpenAI API as types: checked input, encoded output. Data only."""
