"""The world around the processes: its clock, hosts, network, disks, and what carries their messages."""
