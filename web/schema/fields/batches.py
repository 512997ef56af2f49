"""Field tables of files and batches. Data only. Source: openai 3.57 types."""

from web.schema.fields.table import FieldTable, refused_by_value, served

PURPOSE = "batch is served: files are stored for batches only"
ENDPOINT = "/v1/chat/completions and /v1/audio/speech are served"
WINDOW = "24h is served"

FILE = FieldTable(
    "POST /v1/files",
    served("file expires_after expires_after.anchor expires_after.seconds"),
    refused_by_value("purpose", PURPOSE),
)
BATCH = FieldTable(
    "POST /v1/batches",
    served("input_file_id metadata"),
    served("output_expires_after output_expires_after.anchor output_expires_after.seconds"),
    refused_by_value("endpoint", ENDPOINT),
    refused_by_value("completion_window", WINDOW),
)
