"""The env_service: tasks, environments and the rollout loop. Tokens go out to generators, scored groups to the learner.

Granted ─▶ rollout: task ─▶ prompt tokens ─▶ generator ─▶ completions ─▶ reward service ─▶ TrajectoryGroup ─▶ outbox
                                                                          until Acknowledged ◀── learner ◀────┘
"""
