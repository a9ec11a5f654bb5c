"""`headway doctor`: what ails a running system, and what would ail one that is about to be started."""
