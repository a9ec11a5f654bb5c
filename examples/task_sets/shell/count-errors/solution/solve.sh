#!/bin/sh
set -e
cd /app
grep -c ^ERROR app.log > answer.txt
