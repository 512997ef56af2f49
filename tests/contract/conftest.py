"""Fixtures of the contract tests."""

from tests.contract.engine_subjects import folders, shared_engine, subject

__all__ = ["folders", "shared_engine", "subject"]
