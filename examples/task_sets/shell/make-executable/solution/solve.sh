#!/bin/sh
set -e
cd /app
chmod +x tools/*.sh
