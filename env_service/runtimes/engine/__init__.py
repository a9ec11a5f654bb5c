"""Runtimes by a container engine: Docker's HTTP API on a unix socket, which Podman answers as well."""
