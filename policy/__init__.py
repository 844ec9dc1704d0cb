"""What corral.yaml means. Pure: no docker, no network, no root; imports none of the other packages."""
