#!/bin/sh
# Nothing that is in /app is run: what it says is compared with what it has to say.
good=1
cd /app || good=0
for check in /tests/check-*; do
  found=$(/bin/sh "$check" 2>/dev/null)
  [ "$found" = "$(cat "/tests/prints-${check##*-}")" ] || good=0
done
echo "$good" > /logs/verifier/reward.txt
