/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Connection management in a container with two vRNICs: several ADDRESS0 ADDRESS1
 *
 * Identifiers go to the device that has their address, a listener on all addresses hears of both devices by one event
 * channel, and the channel goes on when one device is lost. Prints "ready" when the second vRNIC may be removed.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

static struct sockaddr_in address(const char *text, uint16_t port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = port };
	CHECK(inet_pton(AF_INET, text, &a.sin_addr) == 1);
	return a;
}

static int bind_to(struct rdma_cm_id *id, const char *text, uint16_t port)
{
	struct sockaddr_in a = address(text, port);
	return rdma_bind_addr(id, (struct sockaddr *)&a) ? errno : 0;
}

static struct rdma_cm_id *identifier(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	return id;
}

static int is_on(struct rdma_cm_id *id, const char *device)
{
	return id->verbs && !strcmp(ibv_get_device_name(id->verbs->device), device);
}

/* Waits for the next event by the channel's descriptor. It must be `kind`. Returns its identifier. */
static struct rdma_cm_id *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	struct pollfd p = { channel->fd, POLLIN, 0 };
	struct rdma_cm_event *e;
	CHECK(poll(&p, 1, 20000) == 1);
	CHECK(!rdma_get_cm_event(channel, &e));
	if (e->event != kind)
		printf("%s in place of %s\n", rdma_event_str(e->event), rdma_event_str(kind));
	CHECK(e->event == kind);
	struct rdma_cm_id *id = e->id;
	CHECK(!rdma_ack_cm_event(e));
	return id;
}

static int is_quiet(struct rdma_event_channel *channel)
{
	struct pollfd p = { channel->fd, POLLIN, 0 };
	return poll(&p, 1, 100) == 0;
}

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	CHECK(!rdma_create_qp(id, NULL, &init));
}

/* Connects to a listener of this process, whose request `requests` tells. Returns the client; `served` is the other
 * end. */
static struct rdma_cm_id *connect_to(struct rdma_event_channel *own, struct rdma_event_channel *requests,
				     const char *to, uint16_t port, struct rdma_cm_id **served)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
	struct sockaddr_in a = address(to, port);
	struct rdma_cm_id *id = identifier(own);
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&a, 2000));
	CHECK(expect(own, RDMA_CM_EVENT_ADDR_RESOLVED) == id);
	CHECK(!rdma_resolve_route(id, 2000));
	CHECK(expect(own, RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	make_qp(id);
	CHECK(!rdma_connect(id, &param));
	*served = expect(requests, RDMA_CM_EVENT_CONNECT_REQUEST);
	make_qp(*served);
	CHECK(!rdma_accept(*served, &param));
	CHECK(expect(own, RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(expect(requests, RDMA_CM_EVENT_ESTABLISHED) == *served);
	return id;
}

static void end(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
}

/* Waits for a request. Returns the errno. */
static void *wait_for_request(void *listener)
{
	struct rdma_cm_id *id;
	return (void *)(intptr_t)(rdma_get_request(listener, &id) ? errno : 0);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	struct rdma_event_channel *clients = rdma_create_event_channel(), *first = rdma_create_event_channel(),
				  *second = rdma_create_event_channel();
	CHECK(clients && first && second);
	int devices;
	struct ibv_context **list = rdma_get_devices(&devices);
	CHECK(list && devices == 2 && list[0] != list[1] && !list[2]);
	rdma_free_devices(list);

	/* A channel whose descriptor does not block. */
	struct rdma_cm_event *none;
	CHECK(!fcntl(clients->fd, F_SETFL, O_NONBLOCK));
	CHECK(rdma_get_cm_event(clients, &none) == -1 && errno == EAGAIN);
	CHECK(!fcntl(clients->fd, F_SETFL, 0));

	/* Addresses of the devices, of no device, and of all devices. */
	struct rdma_cm_id *listener = identifier(first), *a = identifier(clients), *b = identifier(clients),
			  *other = identifier(clients);
	int on = 1;
	CHECK(!rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on));
	CHECK(!bind_to(a, argv[1], 0) && is_on(a, "unirdma0"));
	CHECK(!bind_to(b, argv[2], 0) && is_on(b, "unirdma1"));
	CHECK(bind_to(other, "192.0.2.1", 0) == ENODEV && !other->verbs);
	CHECK(bind_to(listener, "0.0.0.0", rdma_get_src_port(b)) == EADDRINUSE);
	CHECK(!bind_to(listener, "0.0.0.0", 0) && !listener->verbs);
	uint16_t port = rdma_get_src_port(listener);
	CHECK(port && bind_to(other, argv[2], port) == EADDRINUSE);
	CHECK(!rdma_listen(listener, 5));
	CHECK(!bind_to(other, argv[2], 0) && is_on(other, "unirdma1"));
	end(a);
	end(b);
	end(other);

	/* One listener, a connection to each device. */
	struct rdma_cm_id *served[3];
	a = connect_to(clients, first, argv[1], port, &served[0]);
	CHECK(is_on(served[0], "unirdma0"));
	b = connect_to(clients, first, argv[2], port, &served[1]);
	CHECK(is_on(served[1], "unirdma1"));
	CHECK(!rdma_disconnect(b));
	CHECK(expect(clients, RDMA_CM_EVENT_DISCONNECTED) == b);
	CHECK(expect(first, RDMA_CM_EVENT_DISCONNECTED) == served[1]);
	end(b);
	end(served[1]);

	/* The listener's events come to another channel, those of both devices. */
	CHECK(!rdma_migrate_id(listener, second));
	b = connect_to(clients, second, argv[2], port, &served[1]);
	CHECK(is_on(served[1], "unirdma1"));
	struct sockaddr_in source = address(argv[2], 0);
	struct sockaddr_in target = address(argv[1], port);
	struct rdma_cm_id *chosen = identifier(clients);
	CHECK(!rdma_resolve_addr(chosen, (struct sockaddr *)&source, (struct sockaddr *)&target, 2000));
	CHECK(expect(clients, RDMA_CM_EVENT_ADDR_RESOLVED) == chosen && is_on(chosen, "unirdma1"));
	end(chosen);
	CHECK(is_quiet(clients) && is_quiet(first) && is_quiet(second));

	/* A thread that waits for the second one alone. */
	struct rdma_cm_id *alone = identifier(NULL);
	pthread_t waits;
	CHECK(!bind_to(alone, argv[2], 0) && !rdma_listen(alone, 1));
	CHECK(!pthread_create(&waits, NULL, wait_for_request, alone));

	/* The second vRNIC goes. What is on it ends, and the first one goes on, by the same channels. */
	printf("ready\n");
	fflush(stdout);
	CHECK(expect(second, RDMA_CM_EVENT_DEVICE_REMOVAL) == served[1]);
	CHECK(is_quiet(second));
	end(served[1]);
	void *why;
	CHECK(!pthread_join(waits, &why) && (intptr_t)why == EIO);
	end(alone);
	end(a);
	CHECK(expect(first, RDMA_CM_EVENT_DISCONNECTED) == served[0]);
	end(served[0]);
	struct rdma_cm_id *again = identifier(first);
	CHECK(!bind_to(again, argv[1], 0) && is_on(again, "unirdma0"));
	end(again);
	struct rdma_event_channel *fresh = rdma_create_event_channel();
	CHECK(fresh);
	again = identifier(fresh);
	CHECK(bind_to(again, argv[2], 0) == ENODEV);
	CHECK(!bind_to(again, "0.0.0.0", 0));
	end(again);
	rdma_destroy_event_channel(fresh);
	/* The client of the one that has gone is on the first vRNIC. */
	CHECK(expect(clients, RDMA_CM_EVENT_DISCONNECTED) == b);
	end(b);
	a = connect_to(clients, second, argv[1], port, &served[0]);
	CHECK(is_on(served[0], "unirdma0"));
	end(a);
	end(served[0]);
	end(listener);
	rdma_destroy_event_channel(clients);
	rdma_destroy_event_channel(first);
	rdma_destroy_event_channel(second);
	printf("done\n");
	return 0;
}
