"""HTTP between the processes: servers, clients, health, status, and who is asked again after a failure."""
