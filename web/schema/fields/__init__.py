"""Tables of the fields of every route and event: each field is served, refused by name, or ignored
for a stated reason.

A field that constrains, forces, ends or conditions an answer is never ignored.
`fleet/docs/fields.md` is generated from these tables, and a test compares them with the types of
the `openai` package. Knows no value of a deployment.
"""
