"""The conversation with env_services: leases out, groups in, batches to the trainer."""
