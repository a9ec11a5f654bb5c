#!/bin/sh
set -e
cd /app
grep -rl TODO src | sort > todo.txt
