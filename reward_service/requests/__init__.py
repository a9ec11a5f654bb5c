"""A request's way through the service: admitted, cut into items, scored, answered."""
