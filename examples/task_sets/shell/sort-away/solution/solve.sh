#!/bin/sh
set -e
cd /app
mkdir archive; mv in/*.log archive/
