"""`json_schema`: the completion holds a JSON value that a schema allows."""
