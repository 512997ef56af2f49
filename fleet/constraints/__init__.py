"""Answers that keep a rule: a JSON schema, a regular expression or a grammar."""
