"""The verifiers that come with the service. Those with heavy imports are loaded in their worker processes only."""
