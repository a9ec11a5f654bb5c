#!/bin/sh
# Keys and tokens, made once. Each process gets those that it shows or checks, in a volume of its own: one that is taken
# over cannot pass for another.
set -e
missing=
for process in learner generator reward-service env-service; do
  test -e "keys/$process/.complete" || missing=yes
done
test -n "$missing" || exit 0

made=$(mktemp -d)
headway keys "$made" --env-service environments > /dev/null

give() {  # give PROCESS FILE...
  process=$1
  shift
  for file in "$@"; do
    cp -R "$made/$file" "keys/$process/"
  done
  touch "keys/$process/.complete"
}
give learner learner.key authorized learner.token generator.token
give generator generator.token learner.token
give reward-service reward-service.token
give env-service environments.key learner.pub env-service.token generator.token reward-service.token
