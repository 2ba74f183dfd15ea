"""A hostile run: what no client, body, kill, disk or wire may do to a server."""
