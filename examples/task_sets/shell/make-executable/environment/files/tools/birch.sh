#!/bin/sh
echo birch
