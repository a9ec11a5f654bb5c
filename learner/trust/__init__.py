"""Trust in generators: evidence, gathered token by token, that one of them does not sample what it says it samples.

    trained tokens ─▶ StepTokens ─▶ outcomes ─┬─▶ levels of the others ─▶ bets ─▶ wealth of each generator ─▶ Suspicion
    whole trajectories ───────────────────────┴─▶ repeats ─────────────▶

Each generator's process is bet against, test by test. A bet is fair or worse for the better as long as the generator is
honest, so the wealth is an e-process: it reaches 1/a with a probability of at most a, whenever and however often one
looks (Ville's inequality). Its logarithm is the evidence, in nats. Source: Ramdas, Grünwald, Vovk and Shafer, "Game-
theoretic statistics and safe anytime-valid inference" (arXiv 2210.01948); betting on means of bounded numbers:
Waudby-Smith and Ramdas (arXiv 2010.09686).

What honest generators have in common is no evidence: the gap between engine and learner, how far the policy has moved
since a token was sampled, which groups are kept. So each is compared with the others at the same lag, and with a
tolerance.

`wagers` is the wealth, `tokens` what is looked at, `levels` what others do, `repeats` what comes twice, `evidence` the
test of all generators, `config` what a user sets.
"""
