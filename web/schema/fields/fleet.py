"""Field tables of bodies under `/v1/fleet`. Data only."""

from web.schema.fields.table import FieldTable, served

ROLE = FieldTable(
    "PUT /v1/fleet/roles/{role}",
    served("replicas", "a whole number from 0 to 64"),
)
JOB = FieldTable(
    "POST /v1/fleet/jobs",
    served("kind"),
    served("arguments", "checked by the kind of job, unknown ones too"),
)
