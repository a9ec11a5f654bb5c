#!/bin/sh
set -e
cd /app
cd notes; for each in *.txt; do mv $each ${each%.txt}.md; done
