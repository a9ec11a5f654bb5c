#!/bin/sh
set -e
cd /app
find box -type f -size 0 -exec rm {} +
