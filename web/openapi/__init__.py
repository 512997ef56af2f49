"""The OpenAPI document, its table of routes, and the check of query parameters against it."""
