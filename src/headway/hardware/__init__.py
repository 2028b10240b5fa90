"""Hardware: chips and what they can do, and the devices this machine has."""

from headway.hardware.chips import CHIPS, Chip, find_chip
from headway.hardware.detect import Devices, devices

__all__ = ["CHIPS", "Chip", "Devices", "devices", "find_chip"]
