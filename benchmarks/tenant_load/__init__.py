"""The Tinker API under the load of many clients: throughput together and one after another, idle crowds, disturbers."""
