"""Several replicas of one model behind one engine: `FleetEngine`, its `Fleet`, and the routers."""
