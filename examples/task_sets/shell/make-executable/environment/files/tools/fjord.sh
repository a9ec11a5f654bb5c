#!/bin/sh
echo fjord
